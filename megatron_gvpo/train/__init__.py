"""The run: the loop, what it remembers, how it stops and goes on."""
