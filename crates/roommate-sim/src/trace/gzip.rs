//! Opens files that may be compressed; detected from their first bytes, never from their name.

use flate2::bufread::MultiGzDecoder;
use std::fs::File;
use std::io::{self, BufReader, Cursor, Read};
use std::path::Path;

const MAGIC: [u8; 2] = [0x1f, 0x8b];
const BUFFER: usize = 64 << 10;
/// Bytes of a plain file that the first filled buffer has at least, if the file has them: readers
/// tell formats by them.
const HEAD: u64 = 4 << 10;

/// Opens a plain or gzip file; `-` is standard input. No other part of the name matters: files get
/// renamed, and browsers decompress .gz files during download.
pub fn open(path: &Path) -> io::Result<BufReader<Box<dyn Read>>> {
    let mut file: Box<dyn Read> =
        if path == Path::new("-") { Box::new(io::stdin()) } else { Box::new(File::open(path)?) };
    let mut head = Vec::new();
    file.by_ref().take(HEAD).read_to_end(&mut head)?;
    let zipped = head.starts_with(&MAGIC);
    let whole = BufReader::with_capacity(BUFFER, Cursor::new(head).chain(file));
    let plain: Box<dyn Read> =
        if zipped { Box::new(MultiGzDecoder::new(whole)) } else { Box::new(whole) };
    Ok(BufReader::with_capacity(BUFFER, plain))
}
