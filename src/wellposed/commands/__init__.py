"""The command line, a file a group of commands. Heavy imports wait until a command needs them."""
