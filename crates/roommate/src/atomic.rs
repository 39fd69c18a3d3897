//! Atomic files: written to a temporary file beside the target, then renamed.

use crate::console;
use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file being written. Dropped without [`Self::keep`], it leaves nothing behind.
pub(crate) struct AtomicFile {
    to: PathBuf,
    out: Sink,
}

enum Sink {
    Plain(BufWriter<Place>),
    Gzip(GzEncoder<BufWriter<Place>>),
}

/// Where the bytes are written.
enum Place {
    /// A temporary file beside the target.
    Beside(NamedTempFile, PathBuf),
    /// A pipe or a device, which a rename would replace by a plain file.
    Straight(File),
}

impl AtomicFile {
    /// Starts a file; a name that ends in `.gz` is compressed.
    pub(crate) fn create(to: &Path) -> anyhow::Result<Self> {
        let place = Place::of(to).with_context(|| problem(to))?;
        let plain = BufWriter::with_capacity(1 << 16, place);
        let out = if to.extension().is_some_and(|e| e == "gz") {
            Sink::Gzip(GzEncoder::new(plain, Compression::fast()))
        } else {
            Sink::Plain(plain)
        };
        Ok(Self { to: to.into(), out })
    }

    /// Writes a text and renames the file into place.
    pub(crate) fn fill(mut self, text: &str) -> anyhow::Result<()> {
        self.write_all(text.as_bytes()).with_context(|| problem(&self.to))?;
        self.keep()
    }

    /// Renames the finished file into place.
    pub(crate) fn keep(self) -> anyhow::Result<()> {
        let finish = || {
            let plain = match self.out {
                Sink::Plain(p) => p,
                Sink::Gzip(g) => g.finish()?,
            };
            match plain.into_inner().map_err(io::IntoInnerError::into_error)? {
                Place::Straight(_) => Ok(()),
                Place::Beside(file, to) => {
                    readable_by_all(file.path())?;
                    file.persist(to).map(drop).map_err(|e| e.error)
                }
            }
        };
        finish().with_context(|| problem(&self.to))
    }
}

fn problem(to: &Path) -> String {
    format!("could not write {}", to.display())
}

/// Refuses to overwrite an input file.
pub(crate) fn keep_apart(read: &Path, write: &Path) -> anyhow::Result<()> {
    let same = read.canonicalize().is_ok_and(|r| write.canonicalize().is_ok_and(|w| r == w));
    if same && read.is_file() {
        let what = format!("{}: it is an input file", problem(write));
        return Err(console::advise(what, "give another output file"));
    }
    Ok(())
}

impl Place {
    fn of(to: &Path) -> anyhow::Result<Self> {
        // A symbolic link stays a link: its target is replaced.
        let to = match to.metadata() {
            Ok(there) if there.is_dir() => anyhow::bail!("it is a folder"),
            Ok(there) if there.is_file() => to.canonicalize()?,
            Ok(_) => return Ok(Self::Straight(File::options().write(true).open(to)?)),
            Err(_) if to.as_os_str().as_encoded_bytes().ends_with(b"/") => {
                anyhow::bail!("it is the name of a folder");
            }
            Err(_) => to.to_path_buf(),
        };
        let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        std::fs::create_dir_all(folder)
            .with_context(|| format!("could not create folder {}", folder.display()))?;
        let file = NamedTempFile::new_in(folder).map_err(|e| nameless(&e))?;
        Ok(Self::Beside(file, to))
    }
}

/// The error without the name of the temporary file, which would not help the user.
fn nameless(error: &io::Error) -> io::Error {
    error.raw_os_error().map_or_else(|| error.kind().into(), io::Error::from_raw_os_error)
}

/// Temporary files have private permissions; the result gets ordinary ones.
#[cfg(unix)]
fn readable_by_all(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn readable_by_all(_: &Path) -> io::Result<()> {
    Ok(())
}

impl Write for Place {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Beside(file, _) => file.write(bytes),
            Self::Straight(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Beside(file, _) => file.flush(),
            Self::Straight(file) => file.flush(),
        }
    }
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.out {
            Sink::Plain(w) => w.write(bytes),
            Sink::Gzip(w) => w.write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.out {
            Sink::Plain(w) => w.flush(),
            Sink::Gzip(w) => w.flush(),
        }
    }
}
