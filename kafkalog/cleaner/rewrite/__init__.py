"""The second pass: which records of a batch stay, and the segments written from them."""
