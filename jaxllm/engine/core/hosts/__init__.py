"""One model over many hosts: the first one schedules and tells the others what to launch."""
