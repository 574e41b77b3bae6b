"""Parts of every run: its folder, components, stop requests and step boundaries."""
