//! Lets Cargo link the extension on macOS, too, where Python's symbols are found when it is imported.

fn main() {
    pyo3_build_config::add_extension_module_link_args();
}
