"""The core's side: what starts and runs an engine core, in whichever process or thread it is."""
