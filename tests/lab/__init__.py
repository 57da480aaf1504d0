"""Heavy rigs, which people run by hand. Each is a folder with a command line of its own."""
