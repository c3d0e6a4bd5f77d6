"""Sound: files, utterances, spectra."""
