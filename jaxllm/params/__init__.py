"""What requests may ask for, and the checks and limits of single values."""
