//! Files of measurements: finds the files of a prefix and reads their rows.

use crate::console;
use anyhow::Context;
use roommate_core::measurement::atlas::Atlas;
use roommate_core::measurement::rows::{self, Row};
use roommate_sim::trace::Problem;
use roommate_sim::trace::gzip;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// All measurements of a prefix, with the model fitted to them.
pub(crate) fn atlas(prefix: &Path) -> anyhow::Result<Atlas> {
    atlas_of(prefix, &sessions(prefix)?)
}

/// The same from rows that are already read.
pub(crate) fn atlas_of(prefix: &Path, sessions: &[Vec<Row>]) -> anyhow::Result<Atlas> {
    Atlas::new(sessions).map_err(|empty| {
        let what = format!("measurements {}: {empty}", quoted(prefix));
        console::advise(what, "rows of tasks alone have `kind`, `name`, `batch`, `sms` and `it_s`")
    })
}

/// The rows of a prefix, one list per file and measuring session.
pub(crate) fn sessions(prefix: &Path) -> anyhow::Result<Vec<Vec<Row>>> {
    let rounds: Vec<_> = files(prefix)?.iter().map(|f| rounds(f)).collect::<Result<_, _>>()?;
    Ok(rounds.into_iter().flatten().collect())
}

/// The rows of one file; `-` is standard input.
pub(crate) fn read(path: &Path) -> anyhow::Result<Vec<Row>> {
    Ok(rounds(path)?.into_iter().flatten().collect())
}

fn rounds(path: &Path) -> anyhow::Result<Vec<Vec<Row>>> {
    let text = text(path).map_err(|e| anyhow::anyhow!("{}", Problem::from(&e)));
    let rows = text.and_then(|text| rows::rounds(&text).map_err(Into::into));
    rows.with_context(|| format!("could not read measurements {}", quoted(path)))
}

fn text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    gzip::open(path)?.read_to_string(&mut text)?;
    Ok(text)
}

/// The files of a prefix, sorted by name: all files of a folder, or those whose names begin with
/// it.
fn files(prefix: &Path) -> anyhow::Result<Vec<PathBuf>> {
    if prefix.is_file() {
        return Ok(vec![prefix.to_owned()]);
    }
    let (folder, begin) = if prefix.is_dir() {
        (prefix, String::new())
    } else {
        let name = prefix.file_name().map(|n| n.to_string_lossy().into_owned());
        (prefix.parent().unwrap_or(Path::new("")), name.unwrap_or_default())
    };
    let here = if folder == Path::new("") { Path::new(".") } else { folder };
    let names = fs::read_dir(here).into_iter().flatten().filter_map(Result::ok);
    let wanted = names.map(|entry| entry.file_name()).filter(|name| {
        let name = name.to_string_lossy();
        name.starts_with(&begin) && name.ends_with(".jsonl")
    });
    let mut files: Vec<PathBuf> = wanted.map(|name| folder.join(name)).collect();
    files.sort();
    if files.is_empty() {
        let what = format!("no measurements at {}", quoted(prefix));
        let hint = "give a folder or a prefix of .jsonl file names, such as profiles/h200";
        return Err(console::advise(what, hint));
    }
    Ok(files)
}

/// A path as shown in errors.
pub(crate) fn quoted(path: &Path) -> String {
    format!("{:?}", path.display().to_string())
}
