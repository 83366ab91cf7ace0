"""Find distributions with plug-ins and install them: from wheels in a folder, or a simple index."""
