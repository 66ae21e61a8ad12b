"""The commands of the command line, by subject; ``cli.py`` gathers them."""
