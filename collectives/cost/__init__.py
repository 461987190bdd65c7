"""Time of a schedule on a modelled network, without MPI."""
