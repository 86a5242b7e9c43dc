"""What every part stands on: checks of arguments, files, the environment, the choice of backend."""
