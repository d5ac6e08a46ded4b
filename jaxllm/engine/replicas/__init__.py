"""Several cores of one model behind one front end: who gets a request, who is restarted, and one client for all."""
