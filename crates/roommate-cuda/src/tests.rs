use super::*;
use std::path::Path;
use std::process::Command;

/// A substitute for the driver library with one fake GPU.
fn fake() -> (tempfile::TempDir, OsString) {
    let folder = tempfile::tempdir().unwrap();
    let library = folder.path().join("libcuda.so.1");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fake-gpu/cuda.c");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"]).arg(&library).arg(source);
    assert!(cc.status().unwrap().success(), "cc must be installed: Rust links with it");
    (folder, library.into_os_string())
}

fn report(library: &std::ffi::OsStr, device: u32, over_mib: u64) -> Report {
    let mut report = Report::default();
    report.error = look(library, device, over_mib, &mut report).err();
    report
}

#[test]
fn the_report_has_all_properties_of_a_gpu() {
    let (_folder, library) = fake();
    let tried =
        |mib, refused: Option<&str>| Some(Tried { mib, refused: refused.map(String::from) });
    let expect = Report {
        sms: Some(132),
        groups: Some(15),
        total_mib: Some(8192),
        free_mib: Some(8192),
        over: tried(9000, Some("CUDA_ERROR_OUT_OF_MEMORY")),
        small: tried(16, None),
        kernel: Some(Kernel { right: true, on_sms: 132 }),
        error: None,
    };
    assert_eq!(report(&library, 0, 9000), expect);
    assert_eq!(report(&library, 0, 4000).over, tried(4000, None));
    assert_eq!(report(&library, 0, 0).over, None);
}

#[test]
fn failures_are_reported() {
    let (_folder, library) = fake();
    let error = |library: &std::ffi::OsStr, device| report(library, device, 0).error.unwrap();
    assert_eq!(error(&library, 1), "could not find the GPU: CUDA_ERROR_INVALID_DEVICE");
    let absent = error(std::ffi::OsStr::new("libno-such.so.1"), 0);
    assert!(absent.starts_with("could not load the CUDA driver's library: libno-such.so.1"));
    assert!(absent.contains("; install NVIDIA's driver"), "{absent}");
    let other = error(std::ffi::OsStr::new("libc.so.6"), 0);
    assert!(other.starts_with("the CUDA driver's library is too old or broken: "), "{other}");
}
