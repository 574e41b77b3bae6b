"""Write files with a released version, so that later versions can be tested on them."""
