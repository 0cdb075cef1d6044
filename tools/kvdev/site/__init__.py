"""The documentation site: pages gathered into one folder, reference pages written from the code, built by MkDocs."""
