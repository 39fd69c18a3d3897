//! Large tensors between the front and its worker: files in shared memory instead of the socket,
//! through which each byte is copied twice. The worker maps them.
//!
//! One file has the inputs of the batch in work, another the outputs of its answer. Tensors follow
//! each other at multiples of [`ALIGN`].

use crate::frame::MOST_BINARY;
use crate::tensor::Form;
use bytes::Bytes;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Bytes of tensors from which on shared memory is used.
pub(crate) const LARGE: usize = 256 << 10;
const ALIGN: usize = 64;
/// Where files are memory.
const MEMORY: &str = "/dev/shm";

/// The files, removed at the end.
pub(crate) struct Shared {
    folder: PathBuf,
    inputs: File,
    outputs: File,
}

impl Shared {
    /// Files that only this user can open; `None` if there is no shared memory.
    pub(crate) fn new() -> Option<Self> {
        Self::below(Path::new(MEMORY)).ok()
    }

    fn below(memory: &Path) -> io::Result<Self> {
        let folder = memory.join(crate::worker::random_name());
        fs::DirBuilder::new().mode(0o700).create(&folder)?;
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).mode(0o600).open(folder.join(name))
        };
        let (inputs, outputs) = (open("inputs")?, open("outputs")?);
        Ok(Self { folder, inputs, outputs })
    }

    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Writes the inputs of a batch. Each of them has one piece for each request.
    pub(crate) fn write(&self, forms: &[Form], data: &[Bytes]) -> io::Result<()> {
        let each = data.len() / forms.len().max(1);
        let mut at = 0_usize;
        for pieces in data.chunks(each.max(1)) {
            for piece in pieces {
                self.inputs.write_all_at(piece, at as u64)?;
                at += piece.len();
            }
            at = at.next_multiple_of(ALIGN);
        }
        Ok(())
    }

    /// The data of outputs of these forms, one after another.
    pub(crate) fn read(&self, forms: &[Form]) -> Result<Bytes, String> {
        let sizes = forms.iter().map(Form::bytes).collect::<Option<Vec<usize>>>();
        let all = sizes.as_ref().and_then(|s| s.iter().try_fold(0_usize, |n, s| n.checked_add(*s)));
        let (Some(sizes), Some(all)) = (sizes, all.filter(|all| *all <= MOST_BINARY)) else {
            return Err(format!("outputs of more than {MOST_BINARY} bytes"));
        };
        let mut data = vec![0; all];
        let (mut from, mut at) = (0, 0_usize);
        for size in sizes {
            let piece = &mut data[from..from + size];
            self.outputs.read_exact_at(piece, at as u64).map_err(|e| format!("outputs: {e}"))?;
            from += size;
            at = (at + size).next_multiple_of(ALIGN);
        }
        Ok(data.into())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_lie_aligned_and_come_back_whole() {
        let memory = tempfile::tempdir().unwrap();
        let shared = Shared::below(memory.path()).unwrap();
        let form = |name: &str, shape: &[u64]| {
            let text = serde_json::json!({ "name": name, "datatype": "UINT8", "shape": shape });
            serde_json::from_value::<Form>(text).unwrap()
        };
        let forms = [form("a", &[2, 3]), form("b", &[2, 100])];
        let bytes = |n: u8, len: usize| Bytes::from(vec![n; len]);
        shared.write(&forms, &[bytes(1, 3), bytes(2, 3), bytes(3, 100), bytes(4, 100)]).unwrap();
        let written = fs::read(shared.folder().join("inputs")).unwrap();
        assert_eq!((&written[..6], written[64], written[263]), (&[1, 1, 1, 2, 2, 2][..], 3, 4));
        fs::write(shared.folder().join("outputs"), &written).unwrap();
        let read = shared.read(&forms).unwrap();
        assert_eq!((read.len(), read[5], read[6], read[205]), (206, 2, 3, 4));
        assert!(shared.read(&[form("a", &[1000])]).is_err(), "less than its shape");
        assert!(shared.read(&[form("a", &[u64::MAX, 2])]).is_err());
        let folder = shared.folder().to_path_buf();
        drop(shared);
        assert!(!folder.exists());
    }
}
