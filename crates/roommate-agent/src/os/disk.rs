//! Files, as far as the state of a daemon depends on them.
//!
//! Each method is one call of the system, so that a twin can fail or die between any two of them.
//! What has to be atomic and durable is put together from them, once ([`replace`]).

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// A file that is being written.
pub(crate) trait Appending: Send {
    /// Adds bytes at the end. After an error some of them may have been written.
    fn write(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Returns when everything written so far survives a loss of power.
    fn sync(&mut self) -> io::Result<()>;
    /// Removes everything beyond this length.
    fn cut(&mut self, length: u64) -> io::Result<()>;
}

/// A file or folder in a folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) is_folder: bool,
}

/// Files and folders. Only their owner can read what is created here. Symbolic links are not
/// followed where a path ends, and only regular files are read: a folder may belong to a tenant.
pub(crate) trait Disk: Send + Sync {
    /// The content of a file of at most `limit` bytes.
    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>>;
    /// Creates a file; an error if it exists.
    fn create(&self, path: &Path) -> io::Result<Box<dyn Appending>>;
    /// Opens a file to add to it, and creates it if it does not exist.
    fn append(&self, path: &Path) -> io::Result<Box<dyn Appending>>;
    /// Gives a file another name, in place of a file that has it.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file a second name; an error if a file has that name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Removes an empty folder.
    fn remove_folder(&self, path: &Path) -> io::Result<()>;
    /// Creates a folder and those above it, where they do not exist.
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    /// What is in a folder, by name.
    fn list(&self, path: &Path) -> io::Result<Vec<Entry>>;
    /// Length of a file.
    fn length(&self, path: &Path) -> io::Result<u64>;
    /// Makes a file or folder another user's.
    fn give(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()>;
    /// Lets all users pass through a folder without seeing what is in it.
    fn open_to_all(&self, path: &Path) -> io::Result<()>;
    /// Which file has this name now, and its length: a number that no other file has, as long as
    /// this one exists.
    fn identify(&self, path: &Path) -> io::Result<(u64, u64)>;
    /// Returns when names created, changed and removed in this folder survive a loss of power.
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
}

/// Writes a file as a whole: after a loss of power it has its old content or its new one.
pub(crate) fn replace(disk: &dyn Disk, path: &Path, bytes: &[u8]) -> io::Result<()> {
    // Added to the whole name: two processes may write `claim.7` and `claim.8` at the same time.
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    match disk.remove(&beside) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    let mut file = disk.create(&beside)?;
    file.write(bytes)?;
    file.sync()?;
    disk.rename(&beside, path)?;
    disk.sync_folder(path.parent().unwrap_or(Path::new(".")))
}

/// Creates a folder and those above it, where they do not exist; all of them survive a loss of
/// power.
pub(crate) fn create_folder(disk: &dyn Disk, path: &Path) -> io::Result<()> {
    let missing = |p: &&Path| disk.list(p).is_err();
    let new: Vec<&Path> = path.ancestors().take_while(missing).collect();
    for folder in new.into_iter().rev() {
        disk.create_folder(folder)?;
        disk.sync_folder(folder.parent().unwrap_or(Path::new("/")))?;
    }
    Ok(())
}

/// The disk of this machine.
pub(crate) struct RealDisk;

/// Opens a regular file without following a symbolic link and without waiting for a writer of a
/// pipe.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
    let file = File::options().read(true).custom_flags(flags.bits() as i32).open(path)?;
    if file.metadata()?.is_file() {
        Ok(file)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file"))
    }
}

/// The last bytes of a file as text; nothing if it cannot be read.
pub(crate) fn tail(path: &Path, most: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = open_regular(path)?;
        let length = file.metadata()?.len();
        file.seek(io::SeekFrom::Start(length.saturating_sub(most)))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

impl Disk for RealDisk {
    fn read(&self, path: &Path, limit: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        let got = open_regular(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
        if got as u64 > limit {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too long"));
        }
        Ok(bytes)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn Appending>> {
        let file = File::options().write(true).create_new(true).mode(0o600).open(path)?;
        Ok(Box::new(RealFile { file, appends: false }))
    }

    fn append(&self, path: &Path) -> io::Result<Box<dyn Appending>> {
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        let mut options = File::options();
        options.append(true).create(true).mode(0o600).custom_flags(flags);
        Ok(Box::new(RealFile { file: options.open(path)?, appends: true }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<Entry>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            // A name that is not UTF-8 is none that this program gave.
            if let Ok(name) = entry.file_name().into_string() {
                found.push(Entry { name, is_folder: entry.file_type()?.is_dir() });
            }
        }
        found.sort();
        Ok(found)
    }

    fn length(&self, path: &Path) -> io::Result<u64> {
        Ok(open_regular(path)?.metadata()?.len())
    }

    fn give(&self, path: &Path, uid: u32, gid: u32) -> io::Result<()> {
        std::os::unix::fs::lchown(path, Some(uid), Some(gid))
    }

    fn open_to_all(&self, path: &Path) -> io::Result<()> {
        fs::set_permissions(path, fs::Permissions::from_mode(0o711))
    }

    fn identify(&self, path: &Path) -> io::Result<(u64, u64)> {
        let found = fs::symlink_metadata(path)?;
        Ok((found.ino(), found.len()))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}

struct RealFile {
    file: File,
    appends: bool,
}

impl Appending for RealFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn cut(&mut self, length: u64) -> io::Result<()> {
        self.file.set_len(length)?;
        if !self.appends {
            // The next write would leave a hole.
            io::Seek::seek(&mut self.file, io::SeekFrom::Start(length))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenants_links_and_pipes_are_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("secret"), "x").unwrap();
        std::os::unix::fs::symlink(at("secret"), at("link")).unwrap();
        assert!(RealDisk.read(&at("link"), 10).is_err());
        assert!(RealDisk.append(&at("link")).is_err());
        assert!(RealDisk.read(folder.path(), 10).is_err());
        assert!(RealDisk.read(&at("secret"), 0).is_err());
        assert_eq!(RealDisk.read(&at("secret"), 1).unwrap(), b"x");
    }

    #[test]
    fn a_file_is_replaced_as_a_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        for text in ["one", "two"] {
            replace(&RealDisk, &path, text.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        let mut file = RealDisk.append(&path).unwrap();
        file.write(b"+three").unwrap();
        file.cut(4).unwrap();
        file.write(b"4").unwrap();
        file.sync().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "two+4");
        let names: Vec<String> =
            RealDisk.list(folder.path()).unwrap().into_iter().map(|e| e.name).collect();
        assert_eq!(names, ["f"]);
    }

    #[test]
    fn names_that_differ_after_a_dot_are_replaced_side_by_side() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: String| {
            let path = folder.path().join(&name);
            (0..200).try_for_each(|_| replace(&RealDisk, &path, name.as_bytes()))
        };
        std::thread::scope(|scope| {
            let both = [7, 8].map(|n| scope.spawn(move || write(format!("claim.{n}"))));
            both.into_iter().for_each(|one| one.join().unwrap().unwrap());
        });
    }
}
