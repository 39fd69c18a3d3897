//! Fakes of NVIDIA's library and programs for tests (`tests/fake-gpu`).

use super::mps::Mps;
use super::nvml::GpuInfo;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tempfile::TempDir;

pub(super) fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-gpu")
}

/// A library with two fake GPUs.
pub(super) struct Nvml {
    pub(super) library: OsString,
    _folder: TempDir,
}

impl Nvml {
    pub(super) fn new() -> Self {
        let into = tempfile::tempdir().unwrap();
        let library = into.path().join("libnvidia-ml.so.1");
        let built = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .arg(&library)
            .arg(folder().join("nvml.c"))
            .status();
        assert!(built.unwrap().success(), "cc is what Rust links with");
        Self { library: library.into_os_string(), _folder: into }
    }

    /// Sets what the library reports from now on.
    pub(super) fn state(&self, lines: &str) {
        let at = Path::new(&self.library).with_extension("1.state");
        let beside = at.with_extension("tmp");
        fs::write(&beside, lines).unwrap();
        fs::rename(beside, at).unwrap();
    }
}

/// A fake GPU.
pub(in crate::device) fn gpu() -> GpuInfo {
    GpuInfo {
        index: 0,
        uuid: "GPU-00000000-fa4e-0000-0000-000000000000".into(),
        name: "NVIDIA H200".into(),
        model: "h200".into(),
        sms: 132,
        mem_mib: 143_771,
        driver: "580.159.01".into(),
        cuda: "13.0".into(),
        mig: false,
        gpm: true,
        default_compute_mode: true,
    }
}

/// An MPS with the fake control program, in this folder.
pub(super) fn mps(root: &Path) -> Mps {
    Mps::new(root, &gpu()).searching(folder().join("bin").into_os_string())
}

/// Waits for something that has to happen soon.
pub(super) fn until(what: &str, mut happened: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !happened() {
        assert!(Instant::now() < end, "not seen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}
