"""Files of other stages, read with suspicion: one that is cut, damaged or of another study is refused."""
