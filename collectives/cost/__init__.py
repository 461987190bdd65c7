"""What a schedule takes on a modelled network, without MPI."""
