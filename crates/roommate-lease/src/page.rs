//! The file: its layout, and how it is mapped.

use crate::{ENTRIES, Gated, HOLDERS};
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use std::{fs, io, process};

/// The first bytes of every lease file, with the version of the layout at the end.
const MAGIC: [u8; 8] = *b"rmLease\x01";
const BYTES: usize = 4096;

/// The file in memory. Any bytes are a valid page: there are only numbers in it, and every number
/// that another process may change is atomic.
#[repr(C)]
pub(crate) struct Page {
    header: Header,
    pub(crate) holders: [Words; HOLDERS],
    pub(crate) entries: [Counts; ENTRIES],
}

const _: () = assert!(size_of::<Page>() == BYTES);

#[repr(C, align(64))]
struct Header {
    magic: [AtomicU32; 2],
}

/// What one holder writes, in a cache line of its own.
#[repr(C, align(64))]
pub(crate) struct Words {
    pub(crate) closed_until: AtomicU64,
    pub(crate) attended_until: AtomicU64,
}

/// What one gated process writes, in a cache line of its own.
#[repr(C, align(64))]
pub(crate) struct Counts {
    pub(crate) pid: AtomicU32,
    pub(crate) group: AtomicU32,
    pub(crate) launches: AtomicU64,
    pub(crate) held_ns: AtomicU64,
    pub(crate) holds: AtomicU64,
}

impl Counts {
    pub(crate) fn clear(&self) {
        self.group.store(0, Relaxed);
        for count in [&self.launches, &self.held_ns, &self.holds] {
            count.store(0, Relaxed);
        }
    }

    pub(crate) fn read(&self, pid: u32) -> Gated {
        Gated {
            pid,
            launches: self.launches.load(Relaxed),
            held: Duration::from_nanos(self.held_ns.load(Relaxed)),
            holds: self.holds.load(Relaxed),
            group: self.group.load(Relaxed),
        }
    }
}

/// A page shared with other processes through its file.
pub(crate) struct Mapped {
    at: NonNull<Page>,
}

// SAFETY: the page is shared with other processes anyway; all access to it is atomic.
unsafe impl Send for Mapped {}
// SAFETY: the same.
unsafe impl Sync for Mapped {}

impl Mapped {
    fn new(file: &File) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping, at a place that the kernel chooses. The caller has checked that
        // the file is as long as that, and nobody shortens a lease file.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), BYTES, access, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).map(|at| Self { at }).ok_or_else(|| io::Error::other("no address"))
    }

    pub(crate) fn get(&self) -> &Page {
        // SAFETY: mapped as long as `self` lives, aligned to a page, and any bytes are a page.
        unsafe { self.at.as_ref() }
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this length; no reference outlives `self`.
        unsafe { libc::munmap(self.at.as_ptr().cast(), BYTES) };
    }
}

pub(crate) fn open(path: &Path) -> io::Result<Mapped> {
    let file = open_file(path)?;
    check(&file).map_err(|what| bad(path, &what))?;
    Mapped::new(&file)
}

pub(crate) fn create(path: &Path) -> io::Result<Mapped> {
    // Another process may create or replace the file between two steps; then the next turn finds
    // what it made.
    for _ in 0..100 {
        match open_file(path) {
            Ok(file) if check(&file).is_ok() => return Mapped::new(&file),
            Ok(file) => replace(path, &file)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => match fresh(path)?.link(path) {
                Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
                _ => {}
            },
            Err(e) => return Err(e),
        }
    }
    Err(bad(path, "something else replaces it again and again"))
}

/// Puts a new file in the place of an invalid one, unless another process has just done so.
fn replace(path: &Path, old: &File) -> io::Result<()> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    if !old.metadata().map_err(named)?.is_file() {
        return Err(bad(path, "not a file"));
    }
    // Released when `old` is closed.
    old.lock().map_err(named)?;
    let id = |m: fs::Metadata| (m.dev(), m.ino());
    let same =
        fs::symlink_metadata(path).is_ok_and(|now| old.metadata().is_ok_and(|o| id(o) == id(now)));
    if same { fresh(path)?.rename(path) } else { Ok(()) }
}

/// A new lease file beside its place; removed unless it gets there.
struct Fresh {
    path: PathBuf,
}

fn fresh(path: &Path) -> io::Result<Fresh> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut beside = path.as_os_str().to_os_string();
    beside.push(format!(".{}-{}", process::id(), NEXT.fetch_add(1, Relaxed)));
    let fresh = Fresh { path: beside.into() };
    // Left by a process of this number that was killed while it created one.
    let _ = fs::remove_file(&fresh.path);
    let named = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    let mut options = OpenOptions::new();
    options.read(true).write(true).create_new(true).mode(0o600);
    let file = options.open(&fresh.path).map_err(named)?;
    let mut bytes = [0; BYTES];
    bytes[..MAGIC.len()].copy_from_slice(&MAGIC);
    file.write_all_at(&bytes, 0).map_err(named)?;
    Ok(fresh)
}

impl Fresh {
    /// Only if there is nothing yet.
    fn link(self, to: &Path) -> io::Result<()> {
        fs::hard_link(&self.path, to)
    }

    fn rename(self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        // After a rename there is nothing to remove.
        let _ = fs::remove_file(&self.path);
    }
}

fn open_file(path: &Path) -> io::Result<File> {
    // A pipe that someone put there must not make the opener wait, nor may a link lead elsewhere.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    opened.map_err(|e| io::Error::new(e.kind(), format!("{}: {e}", path.display())))
}

/// What is wrong with a file, if anything.
fn check(file: &File) -> Result<(), String> {
    let about = file.metadata().map_err(|e| e.to_string())?;
    if !about.is_file() {
        return Err("not a file".into());
    }
    let mut magic = [0; MAGIC.len()];
    let [name @ .., version] = &MAGIC;
    if file.read_exact_at(&mut magic, 0).is_err() || magic[..name.len()] != *name {
        return Err("not a lease file".into());
    }
    if magic[name.len()] != *version {
        return Err(format!(
            "a lease file of version {}, but this program knows version {version}",
            magic[name.len()]
        ));
    }
    if about.len() != BYTES as u64 {
        return Err(format!("a lease file of {} bytes instead of {BYTES}", about.len()));
    }
    Ok(())
}

fn bad(path: &Path, what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("{}: {what}", path.display()))
}
