// The audio calls of openai of npm against a server of Whisper: formats, times of words, a stream, and errors.
import assert from 'node:assert/strict'
import fs from 'node:fs'
import OpenAI, { toFile } from 'openai'

const [url, key, name] = process.argv.slice(2)
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0, timeout: 300_000 })
const model = 'whisper'
const said = /quick.*fox.*lazy dog.*phone number/is
const send = (fields = {}) => client.audio.transcriptions.create({ model, file: fs.createReadStream(name), ...fields })

const { text, usage } = await send()
assert.match(text, said)
assert.deepEqual(usage, { type: 'duration', seconds: 8 })
assert.equal(await send({ response_format: 'text' }), `${text}\n`)
assert.match(await send({ response_format: 'srt' }), /^1\n00:00:0.* --> 00:00:0/)
assert.match(await send({ response_format: 'vtt' }), /^WEBVTT\n\n00:0.* --> 00:0/)

const verbose = await send({ response_format: 'verbose_json', timestamp_granularities: ['word', 'segment'] })
assert.equal(verbose.language, 'en')
assert.equal(verbose.segments.map((each) => each.text).join('').trim(), verbose.text)
assert.equal(verbose.words.map((each) => each.word).join('').trim(), verbose.text)

let streamed = ''
for await (const event of await send({ stream: true })) streamed += event.choices[0].delta.content
assert.equal(streamed, text)

const translated = await client.audio.translations.create({ model, file: fs.createReadStream(name) })
assert.match(translated.text, said)

const noise = await toFile(Buffer.from('hello'), 'a.wav')
await assert.rejects(send({ file: noise }), (error) => error.status === 400 && error.param === 'file')
await assert.rejects(send({ model: 'whisper-1' }), (error) => error.status === 404 && error.param === 'model')
