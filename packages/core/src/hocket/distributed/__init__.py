"""What ranks do together: sharded tensors, and comparing and combining what each of them has."""
