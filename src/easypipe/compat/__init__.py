"""The named interfaces of other libraries, as thin faces over the one engine: they translate, they hold no logic."""
