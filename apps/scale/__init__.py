"""Scale on paper: the topologies' own plans on modelled networks, for thousands of ranks."""
