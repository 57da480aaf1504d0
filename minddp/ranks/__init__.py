"""What ranks say to each other outside of gradients, and how errors name them.

Here: Python objects gathered from all ranks, tensors broadcast from one, waits for other ranks. The lowest room:
imports ``environment`` only. Not here: what is said, and when; gradients' own collectives (``csrc``,
``functional``).
"""
