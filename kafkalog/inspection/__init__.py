"""Looking at the files of a log as they are: `dump` shows one, `verify` judges them all."""
