"""The owner of a directory: adopting a broker's, and releasing one to a broker."""
