//! What a run of the tests does without.

/// Whether this was excluded by name, which is said then.
pub(crate) fn is_left_out(name: &str) -> bool {
    let without = std::env::var("TEST_WITHOUT").unwrap_or_default();
    let is_left_out = without.split(',').any(|excluded| excluded == name);
    if is_left_out {
        println!("{name}: EXCLUDED by TEST_WITHOUT");
    }
    is_left_out
}
