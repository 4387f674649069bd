"""Files without a place on a disk: pipes and open descriptors."""
