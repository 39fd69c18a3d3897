//! Files that are there whole or not at all: written beside their place, then renamed into it.

use anyhow::Context;
use flate2::Compression;
use flate2::write::GzEncoder;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// A file in the making. Dropped without [`Self::keep`] it leaves nothing behind.
pub(crate) struct AtomicFile {
    to: PathBuf,
    out: Sink,
}

enum Sink {
    Plain(BufWriter<NamedTempFile>),
    Gzip(GzEncoder<BufWriter<NamedTempFile>>),
}

impl AtomicFile {
    /// Begins a file; a name that ends in `.gz` is compressed.
    pub(crate) fn create(to: &Path) -> anyhow::Result<Self> {
        let folder = to.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let begun = || {
            std::fs::create_dir_all(folder)?;
            NamedTempFile::new_in(folder)
        };
        let file = begun().with_context(|| format!("could not write {}", to.display()))?;
        let plain = BufWriter::with_capacity(1 << 16, file);
        let out = if to.extension().is_some_and(|e| e == "gz") {
            Sink::Gzip(GzEncoder::new(plain, Compression::fast()))
        } else {
            Sink::Plain(plain)
        };
        Ok(Self { to: to.into(), out })
    }

    /// Puts the finished file in its place.
    pub(crate) fn keep(self) -> anyhow::Result<()> {
        let to = self.to;
        let finish = || -> anyhow::Result<()> {
            let plain = match self.out {
                Sink::Plain(p) => p,
                Sink::Gzip(g) => g.finish()?,
            };
            let file = plain.into_inner().map_err(std::io::IntoInnerError::into_error)?;
            readable_by_all(file.path())?;
            file.persist(&to)?;
            Ok(())
        };
        finish().with_context(|| format!("could not write {}", to.display()))
    }
}

/// Temporary files are private; the result is an ordinary file.
#[cfg(unix)]
fn readable_by_all(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o644))
}

#[cfg(not(unix))]
fn readable_by_all(_: &Path) -> std::io::Result<()> {
    Ok(())
}

impl Write for AtomicFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match &mut self.out {
            Sink::Plain(w) => w.write(bytes),
            Sink::Gzip(w) => w.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match &mut self.out {
            Sink::Plain(w) => w.flush(),
            Sink::Gzip(w) => w.flush(),
        }
    }
}

/// Writes a whole text.
pub(crate) fn write(to: &Path, text: &str) -> anyhow::Result<()> {
    let mut file = AtomicFile::create(to)?;
    file.write_all(text.as_bytes())
        .with_context(|| format!("could not write {}", to.display()))?;
    file.keep()
}
