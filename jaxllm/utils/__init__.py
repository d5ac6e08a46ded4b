"""Small tools that know nothing of models: the log, files, child processes."""
