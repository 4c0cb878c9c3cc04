"""Files that bring up a Ray cluster for LT2, all rendered from one settings file and checked offline."""
