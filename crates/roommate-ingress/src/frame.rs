//! Frames between the front and a worker with the SDK.
//!
//! A frame is the length of its JSON and of its binary data (32 bits each, little endian), the
//! JSON, and the data.

use crate::tensor::{Form, Tensor};
use bytes::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use std::io;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

/// Most bytes of binary data in a frame.
pub(crate) const MOST_BINARY: usize = 64 << 20;
const MOST_JSON: usize = 16 << 20;

/// A message to the worker.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToWorker<'a> {
    Batch(Batch<'a>),
    Tune(&'a RawValue),
    Drain {},
}

/// Requests to answer together.
#[derive(Debug, Serialize)]
pub(crate) struct Batch<'a> {
    pub(crate) id: u64,
    pub(crate) requests: usize,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) inputs: Vec<Form>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) json: Vec<&'a RawValue>,
    /// Whether the inputs are in shared memory instead of this frame.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub(crate) shared: bool,
}

/// A message of the worker.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FromWorker {
    Ready(Ready),
    Done(Done),
    Failed { id: u64, what: String },
}

/// The worker can answer.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Ready {
    #[serde(default)]
    pub(crate) max_batch: Option<u32>,
    #[serde(default)]
    pub(crate) inputs: Vec<Value>,
    #[serde(default)]
    pub(crate) outputs: Vec<Value>,
    #[serde(default)]
    pub(crate) platform: Option<String>,
    /// Whether it takes inputs from shared memory.
    #[serde(default)]
    pub(crate) shared: bool,
}

/// The answers to a batch.
#[derive(Debug, Deserialize)]
pub(crate) struct Done {
    pub(crate) id: u64,
    #[serde(default)]
    pub(crate) outputs: Vec<Form>,
    #[serde(default)]
    pub(crate) json: Option<Vec<Box<RawValue>>>,
    /// Whether the outputs are in shared memory instead of this frame.
    #[serde(default)]
    pub(crate) shared: bool,
}

/// Reads a frame.
pub(crate) async fn read(from: &mut (impl AsyncRead + Unpin)) -> io::Result<(FromWorker, Bytes)> {
    let wrong = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    let json = from.read_u32_le().await? as usize;
    let binary = from.read_u32_le().await? as usize;
    if json > MOST_JSON || binary > MOST_BINARY {
        return Err(wrong(format!("a frame of {json} and {binary} bytes")));
    }
    let mut text = vec![0; json];
    from.read_exact(&mut text).await?;
    let mut data = vec![0; binary];
    from.read_exact(&mut data).await?;
    let message = serde_json::from_slice(&text).map_err(|e| wrong(e.to_string()))?;
    Ok((message, data.into()))
}

/// Writes a frame with these pieces of binary data.
pub(crate) async fn write(
    to: &mut (impl AsyncWrite + Unpin),
    message: &ToWorker<'_>,
    data: &[&Bytes],
) -> io::Result<()> {
    let text = serde_json::to_vec(message).map_err(io::Error::other)?;
    let binary: usize = data.iter().map(|d| d.len()).sum();
    let mut head = Vec::with_capacity(8 + text.len());
    head.extend_from_slice(&(text.len() as u32).to_le_bytes());
    head.extend_from_slice(&(binary as u32).to_le_bytes());
    head.extend_from_slice(&text);
    // Small data goes with the head, in one call.
    if binary <= 64 << 10 {
        data.iter().for_each(|d| head.extend_from_slice(d));
        return to.write_all(&head).await;
    }
    to.write_all(&head).await?;
    for piece in data {
        to.write_all(piece).await?;
    }
    Ok(())
}

/// The outputs of a batch as tensors.
pub(crate) fn outputs(forms: Vec<Form>, data: &Bytes) -> Result<Vec<Tensor>, String> {
    let mut rest = 0;
    let mut tensors = Vec::with_capacity(forms.len());
    for form in forms {
        let end = form.bytes().and_then(|n| n.checked_add(rest)).filter(|end| *end <= data.len());
        let Some(end) = end else { return Err("outputs with less data than their shapes".into()) };
        tensors.push(Tensor { form, data: data.slice(rest..end) });
        rest = end;
    }
    if rest == data.len() { Ok(tensors) } else { Err("outputs with too much data".into()) }
}
