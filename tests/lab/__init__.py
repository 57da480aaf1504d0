"""Rigs that are run by hand: ``make lab`` lists them, and ``make lab ARGS=RIG`` runs one."""
