"""The lab's online judge: correctness first, then time, in one command; see run.py."""
