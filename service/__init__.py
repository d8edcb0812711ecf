"""mhsa-serve's server: wire bytes -> request -> queue -> packed batch -> engine -> response."""
