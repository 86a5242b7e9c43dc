"""Many sequences: resident layers, and the slots of a pool that hold the states."""
