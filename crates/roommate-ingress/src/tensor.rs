//! Tensors and requests of the Open Inference Protocol (v2), as JSON and with binary data.

use bytes::{Bytes, BytesMut};
use serde::de::{DeserializeSeed, Error as _, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use serde_json::{Value, json};

/// The header that says how much of a body is JSON; binary data follows it.
pub const HEADER_LENGTH: &str = "inference-header-content-length";

/// Most dimensions of a tensor.
const MOST_DIMENSIONS: usize = 16;

/// The type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
#[expect(missing_docs, reason = "the names of the protocol")]
pub enum Datatype {
    Bool,
    Uint8,
    Uint16,
    Uint32,
    Uint64,
    Int8,
    Int16,
    Int32,
    Int64,
    Fp16,
    Fp32,
    Fp64,
}

impl Datatype {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        match self {
            Self::Bool | Self::Uint8 | Self::Int8 => 1,
            Self::Uint16 | Self::Int16 | Self::Fp16 => 2,
            Self::Uint32 | Self::Int32 | Self::Fp32 => 4,
            Self::Uint64 | Self::Int64 | Self::Fp64 => 8,
        }
    }

    /// Appends a number of a JSON body; false if the type cannot hold it.
    fn push(self, number: Scalar, to: &mut Vec<u8>) -> bool {
        macro_rules! whole {
            ($kind:ty) => {{
                let value = match number {
                    Scalar::Int(v) => <$kind>::try_from(v).ok(),
                    Scalar::Uint(v) => <$kind>::try_from(v).ok(),
                    Scalar::Bool(v) => Some(<$kind>::from(v)),
                    Scalar::Float(_) => None,
                };
                value.map(|v| to.extend_from_slice(&v.to_le_bytes())).is_some()
            }};
        }
        match self {
            Self::Bool => match number {
                Scalar::Bool(v) => to.push(u8::from(v)),
                Scalar::Int(v @ (0 | 1)) => to.push(v as u8),
                Scalar::Uint(v @ (0 | 1)) => to.push(v as u8),
                _ => return false,
            },
            Self::Uint8 => return whole!(u8),
            Self::Uint16 => return whole!(u16),
            Self::Uint32 => return whole!(u32),
            Self::Uint64 => return whole!(u64),
            Self::Int8 => return whole!(i8),
            Self::Int16 => return whole!(i16),
            Self::Int32 => return whole!(i32),
            Self::Int64 => return whole!(i64),
            Self::Fp32 => to.extend_from_slice(&(number.float() as f32).to_le_bytes()),
            Self::Fp64 => to.extend_from_slice(&number.float().to_le_bytes()),
            // As in the protocol: halves travel only as binary data.
            Self::Fp16 => return false,
        }
        true
    }

    /// The elements as JSON; `None` where the protocol has no such form.
    fn values(self, bytes: &[u8]) -> Option<Value> {
        macro_rules! all {
            ($kind:ty) => {{
                let size = size_of::<$kind>();
                let one = |c: &[u8]| <$kind>::from_le_bytes(c.try_into().unwrap_or_default());
                Value::Array(bytes.chunks_exact(size).map(|c| json!(one(c))).collect())
            }};
        }
        Some(match self {
            Self::Bool => bytes.iter().map(|b| *b != 0).collect(),
            Self::Uint8 => all!(u8),
            Self::Uint16 => all!(u16),
            Self::Uint32 => all!(u32),
            Self::Uint64 => all!(u64),
            Self::Int8 => all!(i8),
            Self::Int16 => all!(i16),
            Self::Int32 => all!(i32),
            Self::Int64 => all!(i64),
            Self::Fp32 => all!(f32),
            Self::Fp64 => all!(f64),
            Self::Fp16 => return None,
        })
    }
}

/// A number or a truth value of a JSON body.
#[derive(Clone, Copy)]
enum Scalar {
    Bool(bool),
    Int(i64),
    Uint(u64),
    Float(f64),
}

impl Scalar {
    fn float(self) -> f64 {
        match self {
            Self::Bool(v) => f64::from(u8::from(v)),
            Self::Int(v) => v as f64,
            Self::Uint(v) => v as f64,
            Self::Float(v) => v,
        }
    }
}

/// What a tensor is, without its data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Form {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub datatype: Datatype,
    /// Its dimensions.
    pub shape: Vec<u64>,
}

impl Form {
    /// Bytes of its data; `None` if that is more than can be.
    pub fn bytes(&self) -> Option<usize> {
        let count = self.shape.iter().try_fold(1_u64, |n, d| n.checked_mul(*d))?;
        usize::try_from(count).ok()?.checked_mul(self.datatype.bytes())
    }
}

/// A tensor: elements in C order, little endian.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// What it is.
    pub form: Form,
    /// Its data.
    pub data: Bytes,
}

impl Tensor {
    /// The elements of the first dimension from `from` on.
    pub fn part(&self, from: u64, count: u64) -> Tensor {
        let rows = self.form.shape.first().copied().unwrap_or(1).max(1);
        let row = self.data.len() / rows as usize;
        let mut form = self.form.clone();
        if let Some(first) = form.shape.first_mut() {
            *first = count;
        }
        Tensor { form, data: self.data.slice(row * from as usize..row * (from + count) as usize) }
    }
}

/// A request for an inference.
#[derive(Clone, Debug, PartialEq)]
pub struct Infer {
    /// Its id, chosen by the client.
    pub id: Option<String>,
    /// The inputs.
    pub inputs: Vec<Tensor>,
    /// Outputs that are wanted, all if there are none, and which of them as binary data.
    wanted: Vec<(String, bool)>,
    /// Whether outputs that are not named are binary data.
    binary: bool,
    /// How long the client waits, µs.
    pub timeout_us: Option<u64>,
}

#[derive(Deserialize)]
struct RequestHead<'a> {
    #[serde(default)]
    id: Option<String>,
    #[serde(borrow)]
    inputs: Vec<InputHead<'a>>,
    #[serde(default)]
    outputs: Vec<OutputHead>,
    #[serde(default)]
    parameters: Parameters,
}

#[derive(Deserialize)]
struct InputHead<'a> {
    name: String,
    datatype: String,
    shape: Vec<u64>,
    #[serde(default)]
    parameters: Parameters,
    #[serde(borrow, default)]
    data: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct OutputHead {
    name: String,
    #[serde(default)]
    parameters: Parameters,
}

#[derive(Default, Deserialize)]
struct Parameters {
    #[serde(default)]
    binary_data_size: Option<usize>,
    #[serde(default)]
    binary_data: Option<bool>,
    #[serde(default)]
    binary_data_output: Option<bool>,
    #[serde(default)]
    timeout: Option<u64>,
    #[serde(default)]
    shared_memory_region: Option<Value>,
}

impl Infer {
    /// Parses the body of a request, of which the first `head` bytes are JSON.
    pub fn read(body: &Bytes, head: usize) -> Result<Self, String> {
        let text = body.get(..head).ok_or("the JSON is longer than the body")?;
        let request: RequestHead<'_> = serde_json::from_slice(text).map_err(|e| e.to_string())?;
        if request.inputs.is_empty() {
            return Err("a request needs inputs".into());
        }
        let mut rest = head;
        let mut inputs = Vec::with_capacity(request.inputs.len());
        for input in request.inputs {
            let wrong = |why: String| format!("input {:?}: {why}", input.name);
            if input.parameters.shared_memory_region.is_some() {
                return Err(wrong("shared memory of clients is not supported".into()));
            }
            let kind = Value::String(input.datatype.clone());
            let datatype = Datatype::deserialize(kind)
                .map_err(|_| wrong(format!("datatype {:?} is not supported", input.datatype)))?;
            let form = Form { name: input.name.clone(), datatype, shape: input.shape };
            if form.shape.is_empty() || form.shape.len() > MOST_DIMENSIONS {
                return Err(wrong(format!("expected 1 to {MOST_DIMENSIONS} dimensions")));
            }
            let bytes = form.bytes().ok_or_else(|| wrong("the shape is too large".into()))?;
            let data = match (input.parameters.binary_data_size, input.data) {
                (Some(size), None) => {
                    let end = rest.checked_add(size).filter(|end| *end <= body.len());
                    let end =
                        end.ok_or_else(|| wrong("the body is shorter than its data".into()))?;
                    let data = body.slice(rest..end);
                    rest = end;
                    data
                }
                (None, Some(values)) => numbers(values.get(), datatype, bytes).map_err(wrong)?,
                _ => return Err(wrong("expected either `data` or `binary_data_size`".into())),
            };
            if data.len() != bytes {
                let found = data.len();
                return Err(wrong(format!("the shape has {bytes} bytes, the data {found}")));
            }
            inputs.push(Tensor { form, data });
        }
        if rest != body.len() {
            return Err("the body is longer than its data".into());
        }
        let binary = request.parameters.binary_data_output.unwrap_or(false);
        let outputs = request.outputs.into_iter();
        let wanted = outputs.map(|o| (o.name, o.parameters.binary_data.unwrap_or(binary)));
        let timeout_us = request.parameters.timeout.filter(|t| *t > 0);
        Ok(Self { id: request.id, inputs, wanted: wanted.collect(), binary, timeout_us })
    }

    /// Rows of the first dimension, the same for all inputs; `None` if they differ.
    pub fn rows(&self) -> Option<u64> {
        let first = self.inputs[0].form.shape[0];
        self.inputs.iter().all(|t| t.form.shape[0] == first).then_some(first)
    }

    /// Whether both can be in one batch: the same inputs but for the first dimension.
    pub fn fits(&self, other: &Self) -> bool {
        let same = |(a, b): (&Tensor, &Tensor)| {
            let (a, b) = (&a.form, &b.form);
            a.name == b.name && a.datatype == b.datatype && a.shape[1..] == b.shape[1..]
        };
        self.inputs.len() == other.inputs.len() && self.inputs.iter().zip(&other.inputs).all(same)
    }

    /// The body of the answer and the length of its JSON, if binary data follows it.
    pub fn answer(
        &self,
        model: &str,
        outputs: &[Tensor],
    ) -> Result<(Bytes, Option<usize>), String> {
        let mut heads = Vec::new();
        let mut binary: Vec<&Bytes> = Vec::new();
        let named = |name: &str| self.wanted.iter().find(|(n, _)| n == name);
        if let Some((lost, _)) =
            self.wanted.iter().find(|(n, _)| outputs.iter().all(|o| o.form.name != *n))
        {
            return Err(format!("the model has no output {lost:?}"));
        }
        for output in outputs {
            let Form { name, datatype, shape } = &output.form;
            let as_binary = match named(name) {
                Some((_, as_binary)) => *as_binary,
                None if self.wanted.is_empty() => self.binary,
                None => continue,
            };
            let mut head = json!({ "name": name, "datatype": datatype, "shape": shape });
            if as_binary {
                head["parameters"] = json!({ "binary_data_size": output.data.len() });
                binary.push(&output.data);
            } else {
                let values = datatype.values(&output.data);
                let no =
                    || format!("output {name:?}: FP16 has no form in JSON; ask for binary data");
                head["data"] = values.ok_or_else(no)?;
            }
            heads.push(head);
        }
        let mut head = json!({ "model_name": model, "model_version": "1", "outputs": heads });
        if let Some(id) = &self.id {
            head["id"] = json!(id);
        }
        let text = head.to_string();
        if binary.is_empty() {
            return Ok((text.into(), None));
        }
        let mut body =
            BytesMut::with_capacity(text.len() + binary.iter().map(|b| b.len()).sum::<usize>());
        body.extend_from_slice(text.as_bytes());
        binary.iter().for_each(|b| body.extend_from_slice(b));
        Ok((body.freeze(), Some(text.len())))
    }
}

/// The numbers of nested or flat lists, as the data of a tensor with `expected` bytes.
fn numbers(text: &str, datatype: Datatype, expected: usize) -> Result<Bytes, String> {
    let mut data = Vec::with_capacity(expected.min(text.len().saturating_mul(8)));
    let mut from = serde_json::Deserializer::from_str(text);
    Flat { datatype, most: expected, to: &mut data }
        .deserialize(&mut from)
        .map_err(|e| e.to_string())?;
    Ok(data.into())
}

/// Flattens lists while they are parsed.
struct Flat<'a> {
    datatype: Datatype,
    most: usize,
    to: &'a mut Vec<u8>,
}

impl Flat<'_> {
    fn push<E: serde::de::Error>(self, number: Scalar) -> Result<(), E> {
        if self.to.len() >= self.most {
            return Err(E::custom("more numbers than the shape has"));
        }
        if self.datatype.push(number, self.to) {
            return Ok(());
        }
        let kind = json!(self.datatype);
        Err(E::custom(format!("a value that {kind} cannot hold in JSON")))
    }
}

impl<'de> DeserializeSeed<'de> for Flat<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Flat<'_> {
    type Value = ();

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("numbers, or lists of them")
    }

    fn visit_bool<E: serde::de::Error>(self, v: bool) -> Result<(), E> {
        self.push(Scalar::Bool(v))
    }

    fn visit_i64<E: serde::de::Error>(self, v: i64) -> Result<(), E> {
        self.push(Scalar::Int(v))
    }

    fn visit_u64<E: serde::de::Error>(self, v: u64) -> Result<(), E> {
        self.push(Scalar::Uint(v))
    }

    fn visit_f64<E: serde::de::Error>(self, v: f64) -> Result<(), E> {
        self.push(Scalar::Float(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        let Self { datatype, most, to } = self;
        while list.next_element_seed(Flat { datatype, most, to: &mut *to })?.is_some() {}
        if to.len() > most {
            return Err(A::Error::custom("more numbers than the shape has"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, binary: &[u8]) -> Result<Infer, String> {
        let body = [text.as_bytes(), binary].concat();
        Infer::read(&body.into(), text.len())
    }

    #[test]
    fn json_and_binary_data_are_the_same() {
        let nested =
            r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[2,2],"data":[[1,2],[3,4.5]]}]}"#;
        let flat = nested.replace("[[1,2],[3,4.5]]", "[1,2,3,4.5]");
        let binary = r#"{"inputs":[{"name":"x","datatype":"FP32","shape":[2,2],
                          "parameters":{"binary_data_size":16}}]}"#;
        let data: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.5].iter().flat_map(|v| v.to_le_bytes()).collect();
        let all = [read(nested, &[]), read(&flat, &[]), read(binary, &data)].map(Result::unwrap);
        assert!(all.iter().all(|r| r.inputs == all[0].inputs && r.rows() == Some(2)));
        assert_eq!(all[0].inputs[0].part(1, 1).data, data[8..]);
        let (text, head) = all[0].answer("m", &all[0].inputs).unwrap();
        assert_eq!(head, None);
        let answer: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(answer["outputs"][0]["data"], json!([1.0, 2.0, 3.0, 4.5]));
    }

    #[test]
    fn outputs_are_chosen_and_binary_where_asked() {
        let text = r#"{"id":"7","inputs":[{"name":"x","datatype":"INT8","shape":[1],"data":[5]}],
                       "outputs":[{"name":"x","parameters":{"binary_data":true}}]}"#;
        let request = read(text, &[]).unwrap();
        let mut other = request.inputs[0].clone();
        other.form.name = "y".into();
        let (body, head) = request.answer("m", &[request.inputs[0].clone(), other]).unwrap();
        let head = head.unwrap();
        let answer: Value = serde_json::from_slice(&body[..head]).unwrap();
        assert_eq!((&answer["id"], &body[head..]), (&json!("7"), &[5_u8][..]));
        assert_eq!(answer["outputs"].as_array().unwrap().len(), 1);
        assert!(request.answer("m", &[]).unwrap_err().contains("no output \"x\""));
    }

    #[test]
    fn what_is_wrong_is_said() {
        let one = |datatype: &str, shape: &str, data: &str| {
            let text = format!(
                r#"{{"inputs":[{{"name":"x","datatype":"{datatype}","shape":{shape},"data":{data}}}]}}"#
            );
            read(&text, &[]).unwrap_err()
        };
        assert!(one("FP32", "[3]", "[1,2]").contains("the shape has 12 bytes, the data 8"));
        assert!(one("FP32", "[1]", "[1,2]").contains("more numbers"));
        assert!(one("UINT8", "[1]", "[256]").contains("cannot hold"));
        assert!(one("UINT8", "[1]", "[0.5]").contains("cannot hold"));
        assert!(one("BYTES", "[1]", "[\"a\"]").contains("datatype \"BYTES\" is not supported"));
        assert!(one("FP32", "[]", "[]").contains("dimensions"));
        assert!(one("FP32", "[18446744073709551615,2]", "[]").contains("too large"));
        assert!(one("FP32", "[1]", "\"1\"").contains("expected numbers"));
        assert!(read(r#"{"inputs":[]}"#, &[]).unwrap_err().contains("needs inputs"));
        let short = r#"{"inputs":[{"name":"x","datatype":"INT8","shape":[2],
                         "parameters":{"binary_data_size":2}}]}"#;
        assert!(read(short, &[1]).unwrap_err().contains("shorter"));
        assert!(read(short, &[1, 2, 3]).unwrap_err().contains("longer"));
    }
}
