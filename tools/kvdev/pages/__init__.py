"""Pages as their readers use them: the commands in them, and how each is shown to be true."""
