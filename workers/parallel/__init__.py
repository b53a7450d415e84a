"""One file an axis, each applied to a plain model from outside, each ignorant of the others."""
