"""Machine code of cubins: decoding, control codes and their static checks."""
