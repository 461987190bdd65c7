"""A group of ranks: `group` has the class that methods and executors take, other modules the parts that it holds.

Parts never refer to the group, which would be freed late as part of a cycle. Calls refer to it.
"""
