//! Access to the shared folder, which is outside the repository.

use std::path::{Path, PathBuf};

/// The shared folder; prints a message and returns `None` where it is absent.
pub(crate) fn shared() -> Option<PathBuf> {
    let folder = std::env::var_os("ROOMMATE_SHARED").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared"),
        PathBuf::from,
    );
    if folder.join("traces").is_dir() {
        return Some(folder);
    }
    let required = std::env::var("ROOMMATE_REQUIRE_SHARED").is_ok_and(|value| value == "1");
    assert!(!required, "../shared is absent, but ROOMMATE_REQUIRE_SHARED=1 asks for it");
    eprintln!("skipped: ../shared is absent");
    None
}
