//! A disk in memory that loses what was not synced when the power fails, and refuses calls when the
//! seed says so.

use crate::os::disk::{Appending, Disk, Entry};
use crate::twin::Faults;
use roommate_core::math::rng::Rng;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

/// The content of a file, and what of it would survive a loss of power.
#[derive(Clone, Default)]
struct Inode {
    bytes: Vec<u8>,
    synced: Vec<u8>,
    /// Length at the sync before the last one.
    before: usize,
}

/// A name of a file, or a folder.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Node {
    File(usize),
    Folder,
}

/// A change of a name that is not synced yet.
#[derive(Clone)]
struct Change {
    path: PathBuf,
    now: Option<Node>,
}

/// The files of the twin.
#[derive(Default)]
pub(super) struct Files {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, Node>,
    /// Names as they survive a loss of power.
    durable: BTreeMap<PathBuf, Node>,
    /// By folder, in order: the file system's own log keeps a prefix of them.
    changes: BTreeMap<PathBuf, Vec<Change>>,
}

fn folder_of(path: &Path) -> PathBuf {
    path.parent().unwrap_or(Path::new("/")).to_owned()
}

fn error(kind: io::ErrorKind) -> io::Error {
    kind.into()
}

impl Files {
    fn set(&mut self, path: &Path, now: Option<Node>) {
        match now {
            Some(node) => self.names.insert(path.to_owned(), node),
            None => self.names.remove(path),
        };
        let change = Change { path: path.to_owned(), now };
        self.changes.entry(folder_of(path)).or_default().push(change);
    }

    fn file(&self, path: &Path) -> io::Result<usize> {
        match self.names.get(path) {
            Some(Node::File(inode)) => Ok(*inode),
            Some(Node::Folder) => Err(error(io::ErrorKind::InvalidInput)),
            None => Err(error(io::ErrorKind::NotFound)),
        }
    }

    fn make(&mut self, path: &Path) -> io::Result<usize> {
        if self.names.get(&folder_of(path)) != Some(&Node::Folder) {
            return Err(error(io::ErrorKind::NotFound));
        }
        self.inodes.push(Inode::default());
        let inode = self.inodes.len() - 1;
        self.set(path, Some(Node::File(inode)));
        Ok(inode)
    }

    fn apply(durable: &mut BTreeMap<PathBuf, Node>, change: Change) {
        match change.now {
            Some(node) => durable.insert(change.path, node),
            None => durable.remove(&change.path),
        };
    }

    /// The disk had only pretended to sync a log for the last time, and had written its copy: only
    /// the copy has the last lines then.
    /// The name of the copy is written as well: a copy that nobody finds is none.
    pub(super) fn forget_sync(&mut self, log: &Path, copy: &Path) {
        let name = copy;
        let (Ok(log), Ok(copy)) = (self.file(log), self.file(copy)) else { return };
        let changes = self.changes.entry(folder_of(name)).or_default();
        let of_copy = changes.iter().rposition(|change| change.path == name);
        for change in changes.drain(..of_copy.map_or(0, |last| last + 1)) {
            Self::apply(&mut self.durable, change);
        }
        let copy = &mut self.inodes[copy];
        copy.synced.clone_from(&copy.bytes);
        let log = &mut self.inodes[log];
        if log.bytes == log.synced && log.before > 0 {
            log.synced.truncate(log.before);
        }
    }

    /// What was not synced is lost, up to a part that the seed decides.
    pub(super) fn lose_power(&mut self, rng: &mut Rng) {
        for (_, changes) in std::mem::take(&mut self.changes) {
            let kept = rng.below(changes.len() as u64 + 1) as usize;
            for change in changes.into_iter().take(kept) {
                Self::apply(&mut self.durable, change);
            }
        }
        self.names.clone_from(&self.durable);
        for inode in &mut self.inodes {
            if inode.bytes == inode.synced {
                continue;
            }
            let added = inode.bytes.starts_with(&inode.synced);
            let mut after = inode.synced.clone();
            if added {
                let more = &inode.bytes[inode.synced.len()..];
                after.extend(&more[..rng.below(more.len() as u64 + 1) as usize]);
            }
            inode.bytes.clone_from(&after);
            inode.synced = after;
        }
    }

    /// Flips a bit of a file; false if it does not exist or is empty.
    pub(super) fn flip(&mut self, path: &Path, rng: &mut Rng) -> bool {
        let Ok(inode) = self.file(path) else { return false };
        let bytes = &mut self.inodes[inode].bytes;
        if bytes.is_empty() {
            return false;
        }
        let at = rng.below(bytes.len() as u64) as usize;
        bytes[at] ^= 1 << rng.below(8);
        self.inodes[inode].synced = self.inodes[inode].bytes.clone();
        true
    }

    /// The content of a file, for invariants.
    pub(super) fn content(&self, path: &Path) -> Option<&[u8]> {
        Some(&self.inodes[self.file(path).ok()?].bytes)
    }
}

/// The disk of the twin, as one process of it sees it.
#[derive(Clone)]
pub(super) struct TwinDisk {
    pub(super) files: Arc<Mutex<Files>>,
    /// Faults of the process that uses it.
    pub(super) faults: Faults,
}

impl TwinDisk {
    pub(super) fn files(&self) -> MutexGuard<'_, Files> {
        self.files.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

struct TwinFile {
    disk: TwinDisk,
    inode: usize,
}

impl Appending for TwinFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let room = self.disk.faults.room(bytes.len());
        self.disk.files().inodes[self.inode].bytes.extend(&bytes[..room]);
        self.disk.faults.call()?;
        if room < bytes.len() { Err(error(io::ErrorKind::StorageFull)) } else { Ok(()) }
    }

    fn sync(&mut self) -> io::Result<()> {
        self.disk.faults.call()?;
        let mut files = self.disk.files();
        let Inode { bytes, synced, before } = &mut files.inodes[self.inode];
        *before = synced.len();
        if bytes.len() >= synced.len() && bytes.starts_with(synced) {
            let from = synced.len();
            synced.extend_from_slice(&bytes[from..]);
        } else {
            synced.clone_from(bytes);
        }
        Ok(())
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.disk.faults.call()?;
        self.disk.files().inodes[self.inode].bytes.truncate(length as usize);
        Ok(())
    }
}

impl Disk for TwinDisk {
    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        self.faults.open()?;
        let files = self.files();
        let bytes = files.inodes[files.file(path)?].bytes.clone();
        if bytes.len() as u64 > limit { Err(error(io::ErrorKind::InvalidData)) } else { Ok(bytes) }
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Appending>> {
        self.faults.open()?;
        let mut files = self.files();
        if files.names.contains_key(path) {
            return Err(error(io::ErrorKind::AlreadyExists));
        }
        let inode = files.make(path)?;
        Ok(Box::new(TwinFile { disk: self.clone(), inode }))
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn Appending>> {
        self.faults.open()?;
        let mut files = self.files();
        let inode = match files.file(path) {
            Ok(inode) => inode,
            Err(e) if e.kind() == io::ErrorKind::NotFound => files.make(path)?,
            Err(e) => return Err(e),
        };
        Ok(Box::new(TwinFile { disk: self.clone(), inode }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        let node = *files.names.get(from).ok_or_else(|| error(io::ErrorKind::NotFound))?;
        // In this order a loss of power never removes both names.
        files.set(to, Some(node));
        files.set(from, None);
        Ok(())
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        let inode = files.file(from)?;
        if files.names.contains_key(to) {
            return Err(error(io::ErrorKind::AlreadyExists));
        }
        files.set(to, Some(Node::File(inode)));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        files.file(path)?;
        files.set(path, None);
        Ok(())
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        match files.names.get(path) {
            Some(Node::Folder) => {}
            _ => return Err(error(io::ErrorKind::NotFound)),
        }
        let below = files.names.range(path.to_owned()..).nth(1);
        if below.is_some_and(|(name, _)| name.starts_with(path)) {
            return Err(error(io::ErrorKind::DirectoryNotEmpty));
        }
        files.set(path, None);
        Ok(())
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        let above: Vec<PathBuf> = path.ancestors().map(Path::to_owned).collect();
        for folder in above.into_iter().rev() {
            match files.names.get(&folder) {
                Some(Node::Folder) => {}
                Some(Node::File(_)) => return Err(error(io::ErrorKind::AlreadyExists)),
                None => files.set(&folder, Some(Node::Folder)),
            }
        }
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        self.faults.open()?;
        let files = self.files();
        if files.names.get(path) != Some(&Node::Folder) {
            return Err(error(io::ErrorKind::NotFound));
        }
        let all = files.names.range(path.to_owned()..);
        let inside = all.take_while(|(name, _)| name.starts_with(path));
        let direct = inside.filter(|(name, _)| name.parent() == Some(path));
        Ok(direct
            .filter_map(|(name, node)| {
                let name = name.file_name()?.to_str()?.to_string();
                Some(Entry { name, is_folder: *node == Node::Folder })
            })
            .collect())
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        self.faults.call()?;
        let files = self.files();
        Ok(files.inodes[files.file(path)?].bytes.len() as u64)
    }

    fn give(&self, _path: &Path, _uid: u32, _gid: u32) -> io::Result<()> {
        self.faults.call()
    }

    fn open_to_all(&self, _path: &Path) -> io::Result<()> {
        self.faults.call()
    }

    fn identify(&self, path: &Path) -> io::Result<(u64, u64)> {
        self.faults.call()?;
        let files = self.files();
        let inode = files.file(path)?;
        Ok((inode as u64, files.inodes[inode].bytes.len() as u64))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.faults.call()?;
        let mut files = self.files();
        for change in files.changes.remove(path).unwrap_or_default() {
            Files::apply(&mut files.durable, change);
        }
        Ok(())
    }
}
