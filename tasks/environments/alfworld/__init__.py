"""ALFWorld: its engine, and problems in its domain. They need the packages of beamline[worlds]."""
