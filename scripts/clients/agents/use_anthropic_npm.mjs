// Anthropic's package of npm against a server: messages, streams, tools, the count of tokens, and errors.
import assert from 'node:assert/strict'
import Anthropic from '@anthropic-ai/sdk'
import { ANSWER, DESCRIPTION, QUESTION, SCHEMA, checkCalled, getWeather } from './weather.mjs'

const [url, key, mode] = process.argv.slice(2)
const client = new Anthropic({ baseURL: url, apiKey: key, authToken: null, maxRetries: 0, timeout: 300_000 })
const model = 'model'
const hello = [{ role: 'user', content: 'Hello.' }]
const tools = [{ name: 'get_weather', description: DESCRIPTION, input_schema: SCHEMA }]

async function checkText() {
  const given = { model, messages: hello, max_tokens: 24, temperature: 0 }
  const whole = await client.messages.create(given)
  const stream = client.messages.stream(given)
  let streamed = ''
  stream.on('text', (piece) => { streamed += piece })
  const message = await stream.finalMessage()
  assert.deepEqual(message.content.map((block) => block.text), whole.content.map((block) => block.text))
  assert.equal(streamed, whole.content[0].text)
  assert.deepEqual(message.usage.output_tokens, whole.usage.output_tokens)
  if (mode === 'replayed') assert.equal(streamed, 'Hello, how are you?')
}

// Let the model call the tool, send its blocks back as they came, and let it answer.
async function checkTools(streamed) {
  const messages = [{ role: 'user', content: QUESTION }]
  const given = { model, messages, tools, max_tokens: 200 }
  const first = { ...given, tool_choice: { type: 'any', disable_parallel_tool_use: true } }
  const message = streamed ? await client.messages.stream(first).finalMessage() : await client.messages.create(first)
  assert.equal(message.stop_reason, 'tool_use')
  const call = message.content.find((block) => block.type === 'tool_use')
  const result = { type: 'tool_result', tool_use_id: call.id, content: getWeather(call.input) }
  messages.push({ role: 'assistant', content: message.content }, { role: 'user', content: [result] })
  checkCalled(mode)
  const final = await client.messages.create(given)
  if (mode === 'replayed') assert.deepEqual(final.content.map((block) => block.text), [ANSWER])
  const counted = await client.messages.countTokens({ model, messages, tools })
  assert.equal(counted.input_tokens, final.usage.input_tokens + (final.usage.cache_read_input_tokens ?? 0))
}

async function checkRunner(stream) {
  const runner = client.beta.messages.toolRunner({
    model,
    stream,
    max_tokens: 200,
    messages: [{ role: 'user', content: QUESTION }],
    tools: [{ ...tools[0], type: 'custom', parse: (input) => input, run: getWeather }],
  })
  const final = await runner.runUntilDone()
  assert.deepEqual(final.content.map((block) => block.text), [ANSWER])
  checkCalled(mode)
}

async function checkErrors() {
  const create = (given) => client.messages.create({ model, messages: hello, max_tokens: 5, ...given })
  await assert.rejects(create({ model: 'other' }), (error) => {
    assert.ok(error instanceof Anthropic.NotFoundError, error)
    assert.equal(error.error.error.type, 'not_found_error')
    return true
  })
  await assert.rejects(create({ stop_sequences: [''] }), Anthropic.BadRequestError)
  await assert.rejects(create({ stream: true, temperature: -1 }), Anthropic.BadRequestError)
  const stranger = new Anthropic({ baseURL: url, apiKey: 'wrong', authToken: null, maxRetries: 0 })
  const refused = async () => await stranger.messages.create({ model, messages: hello, max_tokens: 5 })
  await assert.rejects(refused, Anthropic.AuthenticationError)
}

async function checkLists() {
  const ids = []
  for await (const each of client.models.list()) ids.push(each.id)
  assert.deepEqual(ids, [model])
}

await checkLists()
await checkText()
for (const streamed of [false, true]) await checkTools(streamed)
if (mode === 'replayed') for (const streamed of [false, true]) await checkRunner(streamed)
await checkErrors()
