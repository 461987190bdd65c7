"""Going on after ranks have died: the survivors regroup, and make their calls again."""
