"""A recorded run trained again, without engines: to prove what it did, or to see what another loss would have done."""
