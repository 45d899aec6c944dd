"""Fast paths behind `contract.apply`: the operator (`op`), its products (`stages`), and the fastest way (`cost`)."""
