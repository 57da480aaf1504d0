"""What watches over training and says so when it goes wrong.

Here: steps on gradients that were not averaged, ranks that wait, numbers that are not finite, replicas that drift,
modules that change, collectives out of order, the order in which groups and interpreters end. Each gets what it
needs. Not here: the work itself.
"""
